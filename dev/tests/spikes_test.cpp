// The window that spikes are judged by: its z-scores, and that nothing spoils it for good.
#include "runtime/spikes.h"

#include <gtest/gtest.h>

TEST(SpikeWindow, SaysNothingUntilItIsFull) {
  SpikeWindow window;
  for (size_t i = 0; i < SpikeWindow::size; i++) {
    EXPECT_TRUE(std::isnan(window.z(1e9))) << i;
    window.add(static_cast<double>(i % 2));
  }
  // Half zeros, half ones: mean 1/2, standard deviation 1/2, exactly.
  EXPECT_EQ(window.z(5), 9);
  EXPECT_EQ(window.z(0), -1);
}

TEST(SpikeWindow, NothingNotFiniteStays) {
  SpikeWindow window;
  for (size_t i = 0; i < SpikeWindow::size; i++) {
    window.add(std::nan("")), window.add(HUGE_VAL);
    window.add(static_cast<double>(i % 2));
  }
  EXPECT_EQ(window.z(5), 9);
  EXPECT_TRUE(std::isnan(window.z(std::nan(""))));
  EXPECT_TRUE(std::isnan(window.z(HUGE_VAL)));
  window.add(1e300);  // its square is not finite: then z is 0 or not a number, and never a spike, for 128 steps
  EXPECT_FALSE(window.z(2) > 1);
  for (size_t i = 0; i < SpikeWindow::size; i++) window.add(static_cast<double>(i % 2));
  EXPECT_EQ(window.z(5), 9);
}

TEST(SpikeWindow, EqualValuesHaveNoDeviation) {
  SpikeWindow window(std::vector<double>(SpikeWindow::size, 3.0));
  EXPECT_TRUE(std::isnan(window.z(4)));
}

TEST(SpikeWindow, ANewLevelIsSoonNoSpike) {
  SpikeWindow window;
  for (size_t i = 0; i < SpikeWindow::size; i++) window.add(static_cast<double>(i % 2));
  int spikes = 0;
  for (int i = 0; i < 200; i++) {
    spikes += window.z(10 + i % 2) > 6;
    window.add(10 + i % 2);
  }
  EXPECT_GT(spikes, 0);
  EXPECT_LT(spikes, 5);
}

TEST(SpikeWindow, GoesOnFromItsValues) {
  SpikeWindow window;
  for (int i = 0; i < 300; i++) window.add(i * .1 + (i % 7));
  const SpikeWindow other(window.values());
  EXPECT_EQ(other.values().size(), SpikeWindow::size);
  EXPECT_EQ(other.z(50), window.z(50));
}
