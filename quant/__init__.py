"""How many bits: the codecs of optimizer states, and the tiles that a step goes through in cache.

Knows nothing of plans.
"""
