"""The elements of a web page, as a parser sees them."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """The tags of a page, in order, and its attributes: their names, and the values of links and ids."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.links, self.ids = [], set(), [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            self.attributes.add(name)
            if name in ("href", "src"):
                self.links.append(value)
            if name == "id":
                self.ids.add(value)
