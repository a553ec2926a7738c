"""What is looked at by numbers before a step trains: captured beside plain, micro-batches beside the whole batch."""
