"""The registry of metrics of all processes.

metric.py           the definition of a metric
buffer_service.py   rollout_server.py   learner.py   services.py     the metrics, by process
registry.py         all metrics, by name and by process

To add one: append a `Metric` to the list of its process, set it by name (`Telemetry.gauge(name)`), add a query to its
dashboard row (`deploy/monitoring/`), and run `python -m deploy.monitoring`.
"""
