"""What is measured, and how people see it. Reads records; imports neither torch nor the engine."""
