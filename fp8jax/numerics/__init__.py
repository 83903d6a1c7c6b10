"""Number formats, scales, recipes and policies: pure arithmetic and data, no layers."""
