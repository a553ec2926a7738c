"""Entry of users: the strategy a Trainer takes, options from the environment, and programs that are run with it."""
