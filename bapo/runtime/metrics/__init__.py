"""The registry of metrics: what each process exposes, in one list.

metric.py           what a line of the registry says
buffer_service.py   rollout_server.py   learner.py   services.py     the lines, by process
registry.py         all of them, by name and by process

To add one: append a `Metric` to the list of its process, set it there by name (`Telemetry.gauge(name)`), put a query of
it into the row of the dashboard that it names (`deploy/monitoring/`), and run `python -m deploy.monitoring`.
"""
