"""Python runs this at its start where the folder is on PYTHONPATH: each process of an engine imports a million objects,
which are no garbage.
"""

import gc

gc.set_threshold(100_000, 50, 100)
