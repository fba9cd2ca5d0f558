"""What a finished run has to say: a page for people, and a grade against a plan of faults."""
