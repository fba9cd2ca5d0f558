"""``sdcwatch doctor``: what here would stop bitwise replay, silence the guard or kill it.

`facts` holds what was read, `checks` judges it, `machine` reads it and `cli` shows it.
"""
