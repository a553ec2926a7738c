"""What micro-batches need in order to give what the whole batch gives: totals, weights of terms, derived results."""
