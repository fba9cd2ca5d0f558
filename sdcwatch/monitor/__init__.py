"""Dashboards, alert rules and what serves them, generated from the metric catalogue."""
