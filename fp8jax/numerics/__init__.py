"""Number formats, scales, recipes and policies. Pure arithmetic and data."""
