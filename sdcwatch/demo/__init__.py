"""The demo: a small GPT trained on real text over simulated nodes, with planted faults."""
