"""What to do: levers, their prices, the cut, the simulation that judges, the solver, and the reasons for a decision.

Knows nothing of a GPU, a tensor or a file: it reads a Profile and byte formulas, and planning runs on any machine.
"""
