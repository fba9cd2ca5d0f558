"""Decisions and words of the guard: pure functions and frozen values, standard library only."""
