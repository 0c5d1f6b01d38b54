"""Settings of the site's generator, Sphinx with MyST, which reads Markdown as GitHub does."""

project = "spark-build"
html_title = "spark-build"
extensions = ["myst_parser"]
html_theme = "furo"
#: Code without a language is text, and quotes are as they were written.
highlight_language = "text"
smartquotes = False
#: The anchors of headings are those of GitHub.
myst_heading_anchors = 6
#: Languages of code blocks that the generator does not colour.
suppress_warnings = ["misc.highlighting_failure"]
#: No copy of the sources, and no line with a date: the same pages give the same site.
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_permalinks_icon = "#"
