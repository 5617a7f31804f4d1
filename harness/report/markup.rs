//! HTML and SVG as text, built so that nothing from a file can become markup.
//!
//! Names of tags and attributes are the program's own (`&'static str`); everything else is escaped here. Control characters
//! and those that turn the direction of text are shown as the replacement character.

/// Markup under construction.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Markup(String);

/// Attributes of a tag.
pub(super) type Attrs<'a> = &'a [(&'static str, &'a str)];

impl Markup {
    /// Nothing.
    pub(super) fn new() -> Markup {
        Markup::default()
    }

    /// Opens a tag.
    pub(super) fn open(&mut self, tag: &'static str, attrs: Attrs<'_>) -> &mut Markup {
        self.0.push('<');
        self.0.push_str(tag);
        for (name, value) in attrs {
            self.0.push(' ');
            self.0.push_str(name);
            self.0.push_str("=\"");
            escape_into(&mut self.0, value);
            self.0.push('"');
        }
        self.0.push('>');
        self
    }

    /// Closes a tag.
    pub(super) fn close(&mut self, tag: &'static str) -> &mut Markup {
        self.0.push_str("</");
        self.0.push_str(tag);
        self.0.push('>');
        self
    }

    /// Text, escaped.
    pub(super) fn text(&mut self, text: &str) -> &mut Markup {
        escape_into(&mut self.0, text);
        self
    }

    /// A tag with text in it.
    pub(super) fn leaf(&mut self, tag: &'static str, attrs: Attrs<'_>, text: &str) -> &mut Markup {
        self.open(tag, attrs).text(text).close(tag)
    }

    /// A line break of the source, for whoever reads it.
    pub(super) fn line(&mut self) -> &mut Markup {
        self.0.push('\n');
        self
    }

    /// Markup made elsewhere.
    pub(super) fn append(&mut self, other: &Markup) -> &mut Markup {
        self.0.push_str(&other.0);
        self
    }

    /// The program's own text as it is: the style sheet and the script.
    pub(super) fn own(&mut self, text: &'static str) -> &mut Markup {
        self.0.push_str(text);
        self
    }

    /// Whether nothing is there yet.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text.
    pub(super) fn finish(self) -> String {
        self.0
    }
}

fn escape_into(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => out.push('\u{fffd}'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_written_as_text_is_markup() {
        let mut markup = Markup::new();
        markup.open("p", &[("title", "\"><script>x</script>'&")]).text("</p><script>\u{202e}\u{0}").close("p");
        assert_eq!(
            markup.finish(),
            "<p title=\"&quot;&gt;&lt;script&gt;x&lt;/script&gt;&#39;&amp;\">&lt;/p&gt;&lt;script&gt;\u{fffd}\u{fffd}</p>"
        );
    }
}
