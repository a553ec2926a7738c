"""Show plans and timelines to people: tables, traces."""
