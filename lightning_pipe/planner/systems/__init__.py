"""The published planners, each as its paper says."""
