"""Conversations in, examples out: templates, what may not vanish, masks, packed whole examples."""
