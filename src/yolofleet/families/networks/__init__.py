"""What the networks of several families share: interface, blocks, anchors, cost."""
