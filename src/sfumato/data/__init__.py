"""From files of images to the batch that a step sees."""
