"""Amax histories: how they are kept, shared, merged and updated."""
