"""Candidates: plans in numbers, before they are named and judged, and how they are varied."""
