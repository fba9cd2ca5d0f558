"""The Grafana boards: what they share, and one module each."""
