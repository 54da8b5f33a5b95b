"""From a recipe and data to a model that was trained privately."""
