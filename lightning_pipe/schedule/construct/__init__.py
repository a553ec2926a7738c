"""What schedules are built of: layouts, device orders, time slots, options, and a simulator of chains."""
