"""Every option of this plugin: its default, its check and its meaning."""
