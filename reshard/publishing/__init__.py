"""Publishing: output is made in a hidden sibling of its destination and appears by one rename."""
