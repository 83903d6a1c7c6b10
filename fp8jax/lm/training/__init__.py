"""One step, the loop around it, and what a run needs before and after."""
