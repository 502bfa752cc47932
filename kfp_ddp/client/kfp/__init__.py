"""KFP's API: the connection, pipelines, runs, their steps and pods, and schedules."""
