"""How code travels to a pod: functions, scripts and this package itself."""
