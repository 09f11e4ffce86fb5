"""`JaggedTensor` in parts: what it holds, and a room for each kind of thing that can be done with it."""
