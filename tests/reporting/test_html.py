"""No value can become markup, wherever it stands."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from sfumato.reporting.html import Html, element, together

# An HTML parser turns NUL and carriage returns into something else.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.sampled_from(
    ['"><script>', "' onload='x", "&amp;", "</p>", "<!--", "]]>"]
)


@given(TEXT, TEXT)
def test_a_parser_reads_back_the_very_text_and_attribute_and_no_other_element(content, value):
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, attrs))

        def handle_data(self, data):
            seen.append(data)

    reader = Reader()
    reader.feed(element("p", content, title=value))
    reader.close()
    assert seen[0] == ("p", [("title", value)])
    assert "".join(seen[1:]) == content


def test_markup_is_not_escaped_twice_and_joined_text_is_escaped_once():
    assert together("<", element("b", "&"), Html("<hr>")) == "&lt;<b>&amp;</b><hr>"


def test_a_control_character_is_spelled_out():
    assert element("p", "a\x1b[31mb\tc\n") == "<p>a\\x1b[31mb\tc\n</p>"
