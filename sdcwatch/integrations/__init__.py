"""The guard inside training frameworks: one module each, which imports its framework.

The loop of a framework stays as it is. What is left to do is to make the guard where model and
optimizer exist, to ask it where the framework saves, and to close it at the end.
"""
