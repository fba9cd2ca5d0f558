"""What is computed on one rank: fingerprints, screens, capture and replay. No collectives here."""
