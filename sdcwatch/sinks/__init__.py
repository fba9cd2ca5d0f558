"""Where records go: the event log, OpenTelemetry, Weights & Biases. A sink never stops a step."""
