import java.io.BufferedWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.beam.sdk.nexmark.NexmarkConfiguration;
import org.apache.beam.sdk.nexmark.model.Auction;
import org.apache.beam.sdk.nexmark.model.Bid;
import org.apache.beam.sdk.nexmark.model.Event;
import org.apache.beam.sdk.nexmark.model.Person;
import org.apache.beam.sdk.nexmark.sources.generator.Generator;
import org.apache.beam.sdk.nexmark.sources.generator.GeneratorConfig;

/**
 * Writes the events of Apache Beam's Nexmark generator as tab-separated text, a file per kind of event and slice:
 * NexmarkEvents DIRECTORY EVENTS SLICES BASE_TIME_MS EVENTS_PER_SECOND. Its random numbers are seeded by the events'
 * numbers, so the same arguments give the same files. Prints the number of every slice that is complete.
 */
public class NexmarkEvents {
  public static void main(String[] arguments) throws Exception {
    Path directory = Path.of(arguments[0]);
    long events = Long.parseLong(arguments[1]);
    int slices = Integer.parseInt(arguments[2]);
    NexmarkConfiguration configuration = NexmarkConfiguration.DEFAULT.copy();
    configuration.numEventGenerators = 1; // rates are divided among them
    configuration.firstEventRate = Integer.parseInt(arguments[4]);
    configuration.nextEventRate = configuration.firstEventRate;
    // The generator's own launcher begins with event id 1, too.
    GeneratorConfig config = new GeneratorConfig(configuration, Long.parseLong(arguments[3]), 1, events, 0);
    Generator generator = new Generator(config);
    for (int slice = 0; slice < slices; slice++) {
      long end = events * (slice + 1) / slices;
      String suffix = String.format("-%04d.tsv", slice);
      try (BufferedWriter people = open(directory, "person" + suffix);
          BufferedWriter auctions = open(directory, "auction" + suffix);
          BufferedWriter bids = open(directory, "bid" + suffix)) {
        for (long number = events * slice / slices; number < end; number++) {
          Event event = generator.nextEvent().event;
          if (event.bid != null) {
            write(bids, event.bid);
          } else if (event.newAuction != null) {
            write(auctions, event.newAuction);
          } else {
            write(people, event.newPerson);
          }
        }
      }
      System.out.println(slice);
    }
  }

  private static BufferedWriter open(Path directory, String name) throws Exception {
    return Files.newBufferedWriter(directory.resolve(name), StandardCharsets.UTF_8);
  }

  private static void write(BufferedWriter out, Bid bid) throws Exception {
    line(out, bid.auction, bid.bidder, bid.price, bid.dateTime.getMillis(), bid.extra);
  }

  private static void write(BufferedWriter out, Auction a) throws Exception {
    line(
        out, a.id, a.itemName, a.description, a.initialBid, a.reserve, a.dateTime.getMillis(),
        a.expires.getMillis(), a.seller, a.category, a.extra);
  }

  private static void write(BufferedWriter out, Person p) throws Exception {
    line(out, p.id, p.name, p.emailAddress, p.creditCard, p.city, p.state, p.dateTime.getMillis(), p.extra);
  }

  private static void line(BufferedWriter out, Object... fields) throws Exception {
    for (int i = 0; i < fields.length; i++) {
      if (i > 0) {
        out.write('\t');
      }
      out.write(fields[i].toString());
    }
    out.write('\n');
  }
}
