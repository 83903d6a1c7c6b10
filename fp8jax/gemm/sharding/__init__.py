"""GEMMs inside `shard_map`, and on explicit axes of a mesh."""
