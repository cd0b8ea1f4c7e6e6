"""What is generated from the registry of metrics: dashboards, alerts, Prometheus' configuration and docs.

grafana.py      panels, rows and dashboards as the JSON that Grafana reads
dashboards.py   the three dashboards
alert.py        alerts.py                   what an alert is; all of them
prometheus.py   scrape configuration, rules and their unit tests as YAML
__main__.py     python -m deploy.monitoring writes everything; --check says what is out of date
"""
