"""Decide the order of computes, lower it to a program, and prove the program."""
