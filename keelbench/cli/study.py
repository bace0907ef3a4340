"""Placeholder until the study commands are mounted."""
