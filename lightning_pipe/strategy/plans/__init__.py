"""How a plan comes about in a fit: costs, the planner, a recording of the first steps, and what the user sees."""
