"""Documentation, and what generates the part of it that follows from the code."""
