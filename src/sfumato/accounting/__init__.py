"""What a mechanism costs: numbers in, epsilon out. Nothing here imports torch."""
