"""What several test modules need. No test module imports from another one."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
