"""What a GPU does in a training, and what the host does for it meanwhile: updates, memories, acting."""
