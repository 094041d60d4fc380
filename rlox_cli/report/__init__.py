"""How are runs drawn, compared and listed? Also lists of keys, environments and other choices."""
