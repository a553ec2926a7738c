"""What ranks exchange: values of stages, gradients, results."""
