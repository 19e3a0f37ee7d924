"""How a kernel is cut into tiles: schedules, what they need, which are feasible, the default.

Import `schedule.model` for the plain data; `budget` and `space` bring SymPy with them.
"""
