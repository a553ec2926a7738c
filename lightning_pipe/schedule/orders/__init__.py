"""The schedules with closed orders, a family per file, each under the drawing that is its test."""
