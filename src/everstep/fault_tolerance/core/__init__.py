"""What is decided of `ft_launcher`'s settings and of rank monitors: pure."""
