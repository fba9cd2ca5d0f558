"""Prometheus, Alertmanager, Grafana and a page for notifications, started around a run."""
