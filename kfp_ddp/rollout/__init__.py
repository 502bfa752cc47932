"""The deploy step: a version as a service of KServe, tried before it takes the requests."""
